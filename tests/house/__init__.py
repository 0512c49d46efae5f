"""The size and the shape of the product, in figures that may only fall (`python -m tests.house`)."""
