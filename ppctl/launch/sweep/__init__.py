"""The jobs of a sweep: started side by side or submitted, watched, and summarized."""
