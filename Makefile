.PHONY: check format test bench

check:
	ruff check .
	ruff format --check .
	mypy

format:
	ruff check --fix .
	ruff format .

test:
	pytest -n auto --dist worksteal

bench:
	hfpaged bench generate
