"""`ppctl report`: what runs have left, as one html page: one run in full, or several compared. Loads no JAX."""
