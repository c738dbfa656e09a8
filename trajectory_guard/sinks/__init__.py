"""Sinks: where verdicts and events are written. A sink that fails is reported once and switched off."""
