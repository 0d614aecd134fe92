.PHONY: check format test test-clients bench soak

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

# Random load on a server for 30 minutes; the tests do it for a minute and a half.
soak:
	HFPAGED_SOAK_SECONDS=1800 pytest --timeout 3600 tests/test_serve_load.py
