"""Ranges of files on other machines: web servers and object stores, with many concurrent requests.

`remote_file` is one file, `RangeFetcher` reads ranges of several, `Connections` is the pool that they share.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.io.ranges.connections import Connections as Connections
    from levanter.io.ranges.connections import is_web as is_web
    from levanter.io.ranges.fetcher import FetchStats as FetchStats
    from levanter.io.ranges.fetcher import RangeFetcher as RangeFetcher
    from levanter.io.ranges.fsspec_file import LibraryFile as LibraryFile
    from levanter.io.ranges.fsspec_file import transient_errors as transient_errors
    from levanter.io.ranges.http import HttpFile as HttpFile
    from levanter.io.ranges.object_stores import StoreFile as StoreFile
    from levanter.io.ranges.object_stores import remote_file as remote_file
    from levanter.io.ranges.request import FileIdentity as FileIdentity
    from levanter.io.ranges.request import RangeError as RangeError
    from levanter.io.ranges.request import RangeSource as RangeSource
    from levanter.io.ranges.request import ReplacedError as ReplacedError
    from levanter.io.ranges.request import TransientError as TransientError

export_on_demand(__name__)
