"""One file a schedule family, and the registry of them."""
