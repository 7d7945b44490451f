#!/bin/bash
# -I: nothing in the working folder replaces a module of the checker's.
if python3 -I /tests/check_wrap.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
