"""Programs that measure or predict, too long for tests; each is run by a target of the Makefile."""
