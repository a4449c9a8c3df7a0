"""What runs inside a rank process: its pytest session, its process groups, the ``rank`` fixture."""
