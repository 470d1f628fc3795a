"""The jobs of a sweep: started locally or submitted, watched, and summarized."""
