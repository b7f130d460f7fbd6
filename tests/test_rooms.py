"""The order of the rooms: nothing imports from a later one."""

import subprocess
import sys
from collections import Counter

from import_graph import ROOMS, WITHOUT_FAIRSEQ, imports, modules, wrong_way


def test_nothing_imports_from_a_later_room():
    assert wrong_way() == []


def test_every_module_is_in_a_room():
    assert {module.split(".")[0] for module in modules()} == set(ROOMS)


def test_rooms_without_fairseq():
    found = [use for use in imports(own=False) if use.imported.split(".")[0].startswith("fairseq")]
    assert [use for use in found if use.room in WITHOUT_FAIRSEQ] == []


def test_search_knows_nothing_of_probabilities():
    assert not [use for use in imports(own=True) if use.room == "search" and use.from_room in ("memory", "mixture")]


def test_no_two_modules_have_one_name():
    names = Counter(module.split(".")[-1] for module in modules() if not module.endswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_can_be_read_in_one_sitting():
    lengths = {module: len(path.read_text().splitlines()) for module, path in modules().items()}
    assert {module: length for module, length in lengths.items() if length > 300} == {}


def test_importing_the_package_is_light():
    script = (
        "import sys; hook = sys.excepthook; import fairseq_knnlm\n"
        "assert sys.excepthook is hook\n"
        "assert not {'torch', 'fairseq', 'faiss', 'numpy'} & set(sys.modules), set(sys.modules)\n"
        "from fairseq_knnlm import Datastore, build_index, open_index\n"
        "import fairseq_knnlm.search\n"
        "assert 'fairseq' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
