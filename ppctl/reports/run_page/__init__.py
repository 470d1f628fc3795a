"""`ppctl report`: one run, or a comparison of several, as an html page. Loads no JAX."""
