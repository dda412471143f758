"""The laboratory StockArithmetic-v1: its numbers, its stages, and what they leave on disk."""
