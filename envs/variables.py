"""Environment variables: what agents inherit of this process, and by which clients ask servers here directly."""

from __future__ import annotations

import os
from collections.abc import Collection

_HARMLESS = """
HOME LANG LANGUAGE LOGNAME PATH SHELL TEMP TERM TMP TMPDIR TZ USER
XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
CONDA_PREFIX JAVA_HOME LD_LIBRARY_PATH NODE_PATH PYTHONHASHSEED PYTHONHOME PYTHONPATH PYTHONUNBUFFERED VIRTUAL_ENV
CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS REQUESTS_CA_BUNDLE SSL_CERT_DIR SSL_CERT_FILE
ALL_PROXY HTTPS_PROXY HTTP_PROXY NO_PROXY all_proxy http_proxy https_proxy no_proxy
MKL_NUM_THREADS OMP_NUM_THREADS OPENBLAS_NUM_THREADS TOKENIZERS_PARALLELISM
HF_DATASETS_CACHE HF_DATASETS_OFFLINE HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE NLTK_DATA TRANSFORMERS_OFFLINE
"""
HARMLESS = frozenset(_HARMLESS.split())
"""what code of others inherits, besides LC_* and the variables that the user names"""
_HERE = ("127.0.0.1", "localhost", "::1")


def inherited(names: Collection[str] = ()) -> dict[str, str]:
    """The variables of this process that code of others may see: harmless ones without a login, and ``names``."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in names
        or (name in HARMLESS and not (name.lower().endswith("_proxy") and "@" in value))
        or name.startswith("LC_")
    }


def without_proxy(*hosts: str) -> dict[str, str]:
    """``NO_PROXY``, by which clients ask servers on this machine, and ``hosts``, directly: no proxy reaches them."""
    names = (os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "").split(",")
    if names != ["*"]:
        names = list(filter(None, dict.fromkeys((*names, *_HERE, *hosts))))
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(names))
