"""Parity cases of the trainer: what it gives on one device it gives on every topology."""
