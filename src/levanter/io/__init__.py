"""Files and terminals: paths, atomic writes, progress, logs. Knows nothing of models and never imports jax."""

from levanter.io.atomic import atomic_write as atomic_write
from levanter.io.atomic import special_kind as special_kind
from levanter.io.lease import Lease as Lease
from levanter.io.lease import LeaseError as LeaseError
from levanter.io.lease import LeaseLostError as LeaseLostError
from levanter.io.lease import LeaseTakenError as LeaseTakenError
from levanter.io.lease import leased as leased
from levanter.io.lease import release_all as release_all
from levanter.io.logs import setup_logging as setup_logging
from levanter.io.output import output_is_lost as output_is_lost
from levanter.io.output import prepare_streams as prepare_streams
from levanter.io.output import printing_may_fail as printing_may_fail
from levanter.io.paths import MissingFileError as MissingFileError
from levanter.io.paths import UnreadableFileError as UnreadableFileError
from levanter.io.paths import exists as exists
from levanter.io.paths import expand as expand
from levanter.io.paths import file_size as file_size
from levanter.io.paths import is_remote as is_remote
from levanter.io.paths import join as join
from levanter.io.paths import local_path as local_path
from levanter.io.paths import open_read as open_read
from levanter.io.places import Output as Output
from levanter.io.places import probe as probe
from levanter.io.progress import Progress as Progress
from levanter.io.write_errors import OutputError as OutputError
