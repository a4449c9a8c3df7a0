"""Systems under test, each in a package of its own, and the contract that they share."""
