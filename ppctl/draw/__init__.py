"""Layer 5: a priced schedule as a picture: on the terminal, as html, as an image, as a trace, as numbers."""
