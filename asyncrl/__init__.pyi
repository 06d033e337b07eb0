from asyncrl.api import delete_run as delete_run
from asyncrl.api import evaluate as evaluate
from asyncrl.api import run as run
from asyncrl.api import stop_run as stop_run
from asyncrl.api import sweep as sweep
from asyncrl.config import RunConfig as RunConfig
from asyncrl.config import load_config as load_config
from asyncrl.observe.read_run import RunRecord as RunRecord
from asyncrl.observe.read_run import read_run as read_run

__version__: str
