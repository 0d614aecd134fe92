"""The endpoints, a file for each family; handlers are thin."""
