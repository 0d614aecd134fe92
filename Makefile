.PHONY: check format test test-clients bench

check:
	ruff check .
	ruff format --check .
	mypy

format:
	ruff check --fix .
	ruff format .

test:
	pytest -n auto --dist worksteal

# guidellm, lm-eval and aiperf too; installs those that are not there
test-clients:
	HFPAGED_CLIENTS=1 pytest tests/clients

bench:
	hfpaged bench generate
