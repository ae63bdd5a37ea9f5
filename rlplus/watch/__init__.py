"""`rlplus watch`: a page on this machine that follows runs while they train. It only reads their folders."""

from rlplus.watch.followed_run import FollowedRun, check_watched
from rlplus.watch.view import View
from rlplus.watch.watch_server import WatchServer

__all__ = ["FollowedRun", "View", "WatchServer", "check_watched"]
