#!/bin/sh
# A cluster in DIR/data, run by a user that is not root: prepare DIR | serve DIR PORT | as DIR COMMAND... (run by the same user)
set -eu
bin=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
as=
if [ "$(id -u)" = 0 ]; then
    chown nobody "$2"
    as="setpriv --reuid nobody --clear-groups"
fi
case $1 in
as) shift 2 && exec $as "$@" ;;
prepare) exec $as "$bin/initdb" -D "$2/data" -U postgres --auth trust --no-sync ;;
serve) exec $as "$bin/postgres" -D "$2/data" -h 127.0.0.1 -p "$3" -k '' -c fsync=off ;;
esac
