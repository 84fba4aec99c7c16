"""Who calls the reductions: a framework each, whose private names are in its files alone."""
