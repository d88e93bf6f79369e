"""Ranges of files on other machines: web servers and object stores, many requests side by side.

`remote_file` is one file, `RangeFetcher` reads ranges of several, `Connections` is what they share.
"""

from levanter.io.ranges.attempt import FileIdentity as FileIdentity
from levanter.io.ranges.attempt import RangeError as RangeError
from levanter.io.ranges.attempt import RangeSource as RangeSource
from levanter.io.ranges.attempt import ReplacedError as ReplacedError
from levanter.io.ranges.attempt import TransientError as TransientError
from levanter.io.ranges.connections import Connections as Connections
from levanter.io.ranges.connections import is_web as is_web
from levanter.io.ranges.fetcher import RangeFetcher as RangeFetcher
from levanter.io.ranges.fetcher import Tally as Tally
from levanter.io.ranges.http import HttpFile as HttpFile
from levanter.io.ranges.library import LibraryFile as LibraryFile
from levanter.io.ranges.library import transient_errors as transient_errors
from levanter.io.ranges.stores import StoreFile as StoreFile
from levanter.io.ranges.stores import remote_file as remote_file
