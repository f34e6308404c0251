"""`make mutants`: guards are taken out one by one, and their tests must fail."""
