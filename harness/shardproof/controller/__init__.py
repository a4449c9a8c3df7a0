"""What runs in the pytest process that the user started (or in each xdist worker)."""
