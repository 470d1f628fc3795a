"""`ppctl report`: one run in full, or several compared, as one html page. Loads no JAX."""
