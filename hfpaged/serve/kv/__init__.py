"""What a server tells of its pool, its requests and its last minutes: for the page, and for scripts of operators."""
