"""The classes of findings, one module each.

Each module has a function `find(catalog, ...)` that returns findings. It claims what acting on the finding alone would
free; that claims of different findings overlap is sorted out afterwards (`blobstore.reporting.savings`). Which of two
contents with the same information stays is decided once, for all classes (`kept`).
"""
