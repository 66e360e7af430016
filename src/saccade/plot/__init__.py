"""The pictures that the library writes as SVG or PNG: masks, costs, measured rows, training runs and attention.

`cells` needs only NumPy; the others import matplotlib when a picture is drawn. The same numbers give the same bytes.
"""
