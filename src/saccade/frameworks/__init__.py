"""How NumPy and torch arrays enter the arrow: each module here speaks one framework's arrays and nothing else does."""
