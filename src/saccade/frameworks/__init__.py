"""How arrays of each framework reach a backend: one module per framework, and no other code handles its arrays."""
