"""Where the memory and the time went: spans, metrics, and what is shipped to look at them."""
