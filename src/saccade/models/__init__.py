"""Language models on Saccade's attention. They need torch, and the `train` extra to read or write files."""
