"""A timed schedule as a picture: on the terminal, as html, as an image, as a trace, as numbers."""
