"""Where rooms meet: place, price, lower, simulate, summarise. One path, each step a function on values."""
