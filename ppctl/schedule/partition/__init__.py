"""Which layers each stage holds, by counted or measured costs. Standard library only."""
