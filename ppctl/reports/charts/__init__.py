"""Charts of a timed schedule: terminal text, html, images, and its data as numbers."""
