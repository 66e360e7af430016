"""Every picture that the library writes, as SVG or PNG: of masks, costs, measured rows, training runs and attention.

`cells` needs NumPy alone; the others import matplotlib when a picture is drawn. The same numbers give the same bytes.
"""
