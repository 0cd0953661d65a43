"""Many plans of one model on one machine: which there are, which is fastest and why, and tables of all of them."""
