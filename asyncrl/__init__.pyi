from asyncrl.api import run as run
from asyncrl.config import RunConfig as RunConfig
from asyncrl.config import load_config as load_config
from asyncrl.observe.read_run import RunRecord as RunRecord
from asyncrl.observe.read_run import read_run as read_run

__version__: str
