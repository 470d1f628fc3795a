"""Language models of others as runs, and runs as what others load: config.json, safetensors, GGUF."""
