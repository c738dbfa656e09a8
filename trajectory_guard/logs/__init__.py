"""Readers of training logs. Each turns one kind of file into a LossCurve and says what it did."""
