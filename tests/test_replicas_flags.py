"""`hfpaged serve` with flags for replicas: what they mean together, and what is refused."""

import builtins
import os

import pytest

from hfpaged import cli, replicas
from hfpaged.errors import InvalidConfigError
from hfpaged.replicas.flags import are_wanted, check_sizes, settings_of
from hfpaged.replicas.recipe import Recipe
from hfpaged.replicas.settings import ReplicaSettings
from hfpaged.serve.options import ServeOptions
from hfpaged.serve.telling import warn_if_open

CPUS = os.cpu_count() or 1


@pytest.fixture(autouse=True)
def variables_of_this_test(monkeypatch):
    """Ray's, which are set before it is imported, shall not be those of the clusters of other tests."""
    for name in (*replicas._RAY_VARIABLES, *replicas._ON_LOOPBACK):
        monkeypatch.setenv(name, "")  # it is put back in the end, or taken away
        monkeypatch.delenv(name)


def parsed(*words):
    return cli.build_parser(["serve"]).parse_args(["serve", "model", *words])


def settings(*words, has_cuda=False):
    return settings_of(parsed(*words), has_cuda=has_cuda)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [((), False), (("--replicas", "1"), True), (("--max-replicas", "2"), True), (("--address", "auto"), True)],
)
def test_replicas_are_run_where_a_flag_asks_for_them(words, wanted):
    assert are_wanted(parsed(*words)) is wanted


@pytest.mark.parametrize(
    "words", ["--min-replicas 1", "--num-gpus-per-replica 1", "--num-cpus-per-replica 2", "--app-name x"]
)
def test_a_flag_about_replicas_alone_is_refused(words):
    with pytest.raises(InvalidConfigError, match=words.split()[0]):
        are_wanted(parsed(*words.split()))


NUMBERS = {
    "--replicas 3": (3, 3, 3),
    "--max-replicas 4": (1, 1, 4),
    "--replicas 2 --max-replicas 4": (1, 2, 4),
    "--min-replicas 2 --max-replicas 4": (2, 2, 4),
    "--replicas 3 --min-replicas 2 --max-replicas 4": (2, 3, 4),
    "--address auto": (1, 1, 1),
}


@pytest.mark.parametrize(("words", "numbers"), NUMBERS.items(), ids=NUMBERS)
def test_how_many_replicas_there_are(words, numbers):
    found = settings(*words.split())
    assert (found.min_replicas, found.num_replicas, found.max_replicas) == numbers
    assert found.is_autoscaled == (numbers[0] < numbers[2])


@pytest.mark.parametrize("words", ["--replicas 3 --max-replicas 2", "--replicas 1 --min-replicas 2 --max-replicas 3"])
def test_numbers_in_no_order_are_refused(words):
    with pytest.raises(InvalidConfigError, match="1 <= min <= replicas <= max"):
        settings(*words.split())


def test_a_replica_takes_a_gpu_where_there_are_some():
    assert settings("--replicas", "2", has_cuda=True).num_gpus == 1
    assert settings("--replicas", "2", "--device", "cpu", has_cuda=True).num_gpus == 0
    assert settings("--replicas", "2").num_gpus == 0
    assert settings("--replicas", "2", "--num-gpus-per-replica", "0.5", has_cuda=True).num_gpus == 0.5


def test_without_gpus_this_machines_cpus_are_shared():
    assert settings("--replicas", "1").num_cpus == CPUS
    assert settings("--replicas", str(10 * CPUS)).num_cpus == 1
    assert settings("--replicas", "1", "--address", "auto").num_cpus == 1
    assert settings("--replicas", "1", has_cuda=True).num_cpus == 1
    assert settings("--replicas", "1", "--num-cpus-per-replica", "0.5").num_cpus == 0.5


def test_replicas_that_share_a_gpu_must_say_how_much_each_takes():
    words = ("--replicas", "2", "--num-gpus-per-replica", "0.5")
    with pytest.raises(InvalidConfigError, match="--kv-cache-memory BYTES"):
        check_sizes(parsed(*words), settings(*words, has_cuda=True))
    words = (*words, "--kv-cache-memory", "1GiB")
    check_sizes(parsed(*words), settings(*words, has_cuda=True))
    with pytest.raises(InvalidConfigError, match="--num-gpus-per-replica 0 hides all GPUs"):
        settings("--replicas", "2", "--num-gpus-per-replica", "0", has_cuda=True)


@pytest.mark.parametrize("prefix", ["models", "/models/"])
def test_a_route_prefix_is_a_path(prefix):
    with pytest.raises(InvalidConfigError, match="--route-prefix"):
        ReplicaSettings(route_prefix=prefix)


def test_ray_client_is_refused_by_name():
    with pytest.raises(InvalidConfigError, match="--address auto"):
        settings("--address", "ray://head:10001")


@pytest.mark.parametrize("amount", ["-1", "many", "nan"])
def test_an_amount_is_a_number(amount, capsys):
    with pytest.raises(SystemExit):
        parsed("--num-cpus-per-replica", amount)
    assert "is no amount" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_before_ray_starts(tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path / "none"), "--replicas", "2"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_without_ray_it_is_said_what_to_install(monkeypatch, capsys):
    imported = builtins.__import__

    def without_ray(name, *args, **rest):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return imported(name, *args, **rest)

    def import_module(name):
        return builtins.__import__("ray")

    monkeypatch.setattr(builtins, "__import__", without_ray)
    monkeypatch.setattr(replicas, "import_module", import_module)
    assert cli.main(["serve", "model", "--replicas", "2"]) == 2
    assert "replicas need ray, which is not here; pip install 'hfpaged[ray]'" in capsys.readouterr().err


def test_ray_is_told_to_be_quiet_and_to_send_nothing_home(monkeypatch):
    monkeypatch.setattr(replicas, "import_module", lambda name: None)
    replicas._launch(alone=False)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert not os.environ.keys() & replicas._ON_LOOPBACK.keys()


def test_a_machine_that_is_too_busy_for_ray_to_start_is_told_of(monkeypatch):
    cluster = pytest.importorskip("hfpaged.replicas.cluster")

    def init(**_):
        raise Exception("The current node timed out during startup. This could happen because ...\nmore")

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(cluster.RayStartError, match=r"timed out during startup.*when the machine is less busy"):
        cluster.join(ReplicaSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "some.machine"])
def test_an_address_that_others_reach_without_a_key_is_warned_of(host, caplog):
    warn_if_open(ServeOptions(), host, "http://it")
    assert "http://it can be reached from other machines" in caplog.text
    caplog.clear()
    warn_if_open(ServeOptions(api_keys={"a": "key"}), host, "http://it")
    assert not caplog.records


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_an_address_of_this_machine_alone_is_not(host, caplog):
    warn_if_open(ServeOptions(), host, "http://it")
    assert not caplog.records


@pytest.mark.parametrize(("address", "warns"), [("127.0.0.1:6379", True), (None, False)])
def test_keys_on_the_command_line_are_warned_of_where_ray_shows_them_to_a_cluster(address, warns, monkeypatch, capsys):
    launch = pytest.importorskip("hfpaged.replicas.launch")

    def join(settings):
        raise InvalidConfigError("far enough")

    monkeypatch.setattr(launch.cluster, "join", join)
    recipe = Recipe(options=ServeOptions(salt_secret=b"secret"))
    with pytest.raises(InvalidConfigError, match="far enough"):
        launch.run(recipe, ReplicaSettings(address=address), "127.0.0.1", 0, shows_keys=True)
    assert ("--api-key-file" in capsys.readouterr().err) == warns


def test_it_is_known_whether_keys_stand_on_the_command_line(monkeypatch):
    class Launch:
        @staticmethod
        def run(*args, shows_keys):
            return 10 + shows_keys

    monkeypatch.setattr(replicas, "import_module", lambda name: Launch)
    assert cli.main(["serve", "model", "--replicas", "2", "--api-key", "k"]) == 11
    monkeypatch.setenv("HFPAGED_API_KEY", "k")
    assert cli.main(["serve", "model", "--replicas", "2"]) == 10


def test_what_prints_a_recipe_prints_no_key():
    recipe = Recipe(options=ServeOptions(api_keys={"a": "key-of-a"}, salt_secret=b"of-salts"), model="m")
    assert "model='m'" in repr(recipe)
    assert "key-of-a" not in repr(recipe)
    assert "of-salts" not in repr(recipe)
