#!/bin/sh
# A cluster in DIR/data, run by a user that is not root: prepare DIR | serve DIR PORT | bouncer DIR PORT | as DIR COMMAND... (run by the same user)
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
bouncer)
    # The server's own port is the next but a thousand; it ends with the script's process group.
    behind=$(($3 + 1000))
    cat >"$2/bouncer.ini" <<CONF
[databases]
postgres = host=127.0.0.1 port=$behind user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = $3
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
max_client_conn = 4000
ignore_startup_parameters = extra_float_digits
CONF
    chmod 644 "$2/bouncer.ini"
    $as "$bin/postgres" -D "$2/data" -h 127.0.0.1 -p $behind -k '' -c fsync=off &
    exec $as pgbouncer "$2/bouncer.ini"
    ;;
esac
