"""Detectors: small states over standardised residuals. This room stands on nothing of ours."""
