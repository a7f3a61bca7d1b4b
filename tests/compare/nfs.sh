#!/bin/sh
# A configuration in DIR/ganesha.conf, for PORT: a file of 1 MiB, by NFS 4 (which needs no port mapper).
set -eu
mkdir -p "$1/files"
head -c 1048576 /dev/zero >"$1/files/file"
cat >"$1/ganesha.conf" <<CONF
NFS_CORE_PARAM { Protocols = 4; Bind_addr = 127.0.0.1; NFS_Port = $2; Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false; }
NFS_KRB5 { Active_krb5 = false; }
NFSV4 { Graceless = true; RecoveryBackend = fs; }
EXPORT {
    Export_Id = 1; Path = $1/files; Pseudo = /files; Access_Type = RW; Squash = No_Root_Squash; Sectype = sys; Protocols = 4;
    FSAL { Name = VFS; }
}
CONF
