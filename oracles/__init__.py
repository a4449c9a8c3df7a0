"""References on one device, from code that is not ours: transformers, and formulas."""
