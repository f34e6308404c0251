"""`make fuzz`: coverage-guided search for files on which a reader crashes, hangs, or differs from another reader."""
