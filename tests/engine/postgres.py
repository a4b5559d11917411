"""A PostgreSQL server in a temporary folder: Debian's package, this process's own cluster.

Enters nothing, leaves URLs of empty databases. Invariant: it listens on the loopback alone, asks
for a password, syncs its log, and is gone afterwards.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg import sql

from ratoon.sole_service import free_port

USER = "ratoon"
# PostgreSQL refuses to run as root; Debian's package makes this account.
SERVICE_USER = "postgres"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresServer:
    """`folder` holds the cluster and its socket; `commands` the server's own programs."""

    folder: Path
    commands: Path
    port: int
    password: str

    def url(self, database: str) -> str:
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def create_database(self, tablespace: str = "pg_default") -> str:
        """The URL of a new, empty database."""
        name = f"journal_{secrets.token_hex(4)}"
        create = sql.SQL("CREATE DATABASE {} TABLESPACE {}")
        self.execute(create.format(sql.Identifier(name), sql.Identifier(tablespace)))
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Whoever uses it."""
        name = sql.Identifier(url.rpartition("/")[2])
        self.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))

    def execute(self, statement: sql.Composed | sql.SQL) -> None:
        """Run a statement as the superuser, outside a transaction."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement)

    def show(self, setting: str) -> str:
        """What a new session finds a setting to be."""
        with psycopg.connect(self.url("postgres")) as connection:
            row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
        assert row is not None
        return str(row[0])

    def make_standby(self, folder: Path) -> PostgresServer:
        """A copy that streams from this server once it is started; it takes no writes yet."""
        standby = replace(self, folder=folder, port=free_port())
        if os.getuid() == 0:
            shutil.chown(folder, SERVICE_USER)
        source = f"host=127.0.0.1 port={self.port} user={USER} password={self.password}"
        arguments = [f"--dbname={source}", f"--pgdata={standby._data}", "--checkpoint=fast"]
        standby._run("pg_basebackup", *arguments, "--write-recovery-conf", "--no-sync")
        return standby

    def wait_for(self, primary: PostgresServer) -> None:
        """Until this standby has all that the other one has written by now."""
        with psycopg.connect(primary.url("postgres")) as connection:
            wanted = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            behind = "SELECT pg_last_wal_replay_lsn() < %s::pg_lsn"
            while connection.execute(behind, wanted).fetchone() != (False,):
                time.sleep(0.02)

    def wait_for_setting(self, setting: str, value: str) -> None:
        while self.show(setting) != value:
            time.sleep(0.02)

    def promote(self) -> None:
        """A standby becomes the server, with what it has of the other one."""
        self._control("promote", "--wait")

    def initialise(self) -> None:
        secret = self.folder / "password"
        secret.write_text(self.password)
        if os.getuid() == 0:
            shutil.chown(self.folder, SERVICE_USER)
            shutil.chown(secret, SERVICE_USER)
        arguments = ["--auth=scram-sha-256", f"--username={USER}", f"--pwfile={secret}"]
        locale = ["--locale=C.UTF-8", "--encoding=UTF8"]
        # What is synced here is only the empty cluster; the server syncs as it does by default.
        self._run("initdb", *arguments, *locale, "--no-sync", f"--pgdata={self._data}")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -k {self.folder}"
        log = self.folder / "server.log"
        self._control("start", "--wait", f"--log={log}", f"--options={options}")

    def stop(self, mode: str) -> None:
        """`mode` "fast" ends it; "immediate" is a crash: it recovers at its next start."""
        self._control("stop", "--wait", f"--mode={mode}")

    def kill(self) -> None:
        """SIGKILL to all of its processes at once; the next start recovers."""
        leader = psutil.Process(int((self._data / "postmaster.pid").read_text().split()[0]))
        leader.suspend()  # It begins no other.
        processes = [leader, *leader.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", f"--pgdata={self._data}", *arguments)

    def _run(self, command: str, *arguments: str) -> None:
        # Not `subprocess.run(user=...)`: it forks, and gRPC aborts a fork of a thread of its.
        as_user = [
            "setpriv",
            f"--reuid={SERVICE_USER}",
            f"--regid={SERVICE_USER}",
            "--clear-groups",
        ]
        # A file, not a pipe: the server inherits it and would keep a pipe open.
        with (self.folder / "commands.log").open("a") as log:
            subprocess.run(
                [*(as_user if os.getuid() == 0 else []), self.commands / command, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=60,
            )


def _folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Where pytest's are, but open to the server's own user."""
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    return tempfile.TemporaryDirectory(prefix=prefix, dir=root)


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server for as long as the block lasts; skips where PostgreSQL is not installed."""
    commands = find_commands()
    if commands is None:
        # `.ci/run` installs it, so there its absence is a failure.
        assert not os.environ.get("CI"), "postgresql is not installed"
        pytest.skip("postgresql is not installed: scripts/install-test-services.sh")
    with _folder("ratoon-postgres-") as folder:
        server = PostgresServer(
            folder=Path(folder),
            commands=commands,
            port=free_port(),
            password=secrets.token_urlsafe(16),
        )
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")  # Nobody needs its data any more.


@contextmanager
def pair_folder() -> Iterator[Path]:
    """For a standby, `folder / "standby"`, and a machine, `folder / "m"`."""
    with _folder("ratoon-standby-") as folder:
        Path(folder).chmod(0o755)  # The server's own user may enter it.
        (Path(folder) / "m").mkdir()
        yield Path(folder)


@contextmanager
def a_pair(folder: Path) -> Iterator[tuple[PostgresServer, PostgresServer, str]]:
    """A server, a standby that follows it, and the URL of a database on whichever takes writes."""
    with running_postgres() as primary:
        database = primary.create_database().rpartition("/")[2]
        folder.mkdir()
        standby = primary.make_standby(folder)
        standby.start()
        hosts = "&".join(f"host=127.0.0.1:{server.port}" for server in (primary, standby))
        url = f"postgresql://{USER}:{primary.password}@/{database}?{hosts}"
        try:
            yield primary, standby, url
        finally:
            with suppress(Exception):
                standby.stop("immediate")
            # Its own end expects it to run.
            with suppress(Exception):
                primary.start()


def find_commands() -> Path | None:
    """Debian keeps them out of PATH, in a folder for each major version."""
    debian = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    found = str(debian[-1]) if debian else shutil.which("initdb")
    return None if found is None else Path(found).parent
