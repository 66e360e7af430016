"""Language models on Saccade's attention; they need torch, and what they read or write the `train` extra."""
