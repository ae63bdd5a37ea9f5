"""`rlplus watch`: a page on this machine that follows runs while they train. It only reads their folders."""

from rlplus.tools.watch.followed_run import FollowedRun, check_watched
from rlplus.tools.watch.view import View
from rlplus.tools.watch.watch_server import WatchServer

__all__ = ["FollowedRun", "View", "WatchServer", "check_watched"]
