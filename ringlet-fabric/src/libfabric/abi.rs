//! libfabric's structs and constants, as its headers of version 1.17 have them. What is inline there is a call through one of these tables.
//!
//! Names are the headers', without `fi_` and `fid_`. A table ends with the last entry that is used; `layout` compares all with the headers.

use std::ffi::{c_char, c_int, c_void};

/// Defines structs, and for the tests what the headers must say of them.
macro_rules! structs {
    ($($(#[$attribute:meta])* $name:ident = $c:literal { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$attribute])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }
        )*
        /// Of each field: the struct's name in C, its own, its offset, its size.
        #[cfg(test)]
        pub const FIELDS: &[(&str, &str, usize, usize)] = &[
            $($((
                $c,
                stringify!($field),
                std::mem::offset_of!($name, $field),
                size_of::<$type>(),
            ),)*)*
        ];
        /// Of each struct: its name in C, its size.
        #[cfg(test)]
        pub const STRUCTS: &[(&str, usize)] = &[$(($c, size_of::<$name>()),)*];
    };
}

macro_rules! constants {
    ($($name:ident: $type:ty = $value:expr, $c:literal;)*) => {
        $(pub const $name: $type = $value;)*
        #[cfg(test)]
        pub const CONSTANTS: &[(&str, u64)] = &[$(($c, $name as u64),)*];
    };
}

/// An entry of a table that is not called.
type Unused = *const c_void;

structs! {
    Fid = "fid" {
        fclass: usize,
        context: *mut c_void,
        ops: *const Ops,
    }
    Ops = "fi_ops" {
        size: usize,
        close: Option<unsafe extern "C" fn(*mut Fid) -> c_int>,
        bind: Option<unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int>,
        control: Option<unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int>,
    }
    Fabric = "fid_fabric" {
        fid: Fid,
        ops: *const FabricOps,
        api_version: u32,
    }
    FabricOps = "fi_ops_fabric" {
        size: usize,
        domain: Option<unsafe extern "C" fn(*mut Fabric, *mut Info, *mut *mut Domain, *mut c_void) -> c_int>,
        passive_ep: Unused,
        eq_open: Unused,
        wait_open: Unused,
        trywait: Option<unsafe extern "C" fn(*mut Fabric, *mut *mut Fid, c_int) -> c_int>,
    }
    Domain = "fid_domain" {
        fid: Fid,
        ops: *const DomainOps,
        mr: *const MrOps,
    }
    DomainOps = "fi_ops_domain" {
        size: usize,
        av_open: Option<unsafe extern "C" fn(*mut Domain, *mut AvAttr, *mut *mut Av, *mut c_void) -> c_int>,
        cq_open: Option<unsafe extern "C" fn(*mut Domain, *mut CqAttr, *mut *mut Cq, *mut c_void) -> c_int>,
        endpoint: Option<unsafe extern "C" fn(*mut Domain, *mut Info, *mut *mut Endpoint, *mut c_void) -> c_int>,
    }
    #[allow(clippy::type_complexity)]
    MrOps = "fi_ops_mr" {
        size: usize,
        reg: Option<unsafe extern "C" fn(*mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut Mr, *mut c_void) -> c_int>,
    }
    Mr = "fid_mr" {
        fid: Fid,
        mem_desc: *mut c_void,
        key: u64,
    }
    Av = "fid_av" {
        fid: Fid,
        ops: *const AvOps,
    }
    AvOps = "fi_ops_av" {
        size: usize,
        insert: Option<unsafe extern "C" fn(*mut Av, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int>,
        insertsvc: Unused,
        insertsym: Unused,
        remove: Option<unsafe extern "C" fn(*mut Av, *mut u64, usize, u64) -> c_int>,
    }
    AvAttr = "fi_av_attr" {
        kind: u32,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }
    Cq = "fid_cq" {
        fid: Fid,
        ops: *const CqOps,
    }
    CqOps = "fi_ops_cq" {
        size: usize,
        read: Option<unsafe extern "C" fn(*mut Cq, *mut c_void, usize) -> isize>,
        readfrom: Unused,
        readerr: Option<unsafe extern "C" fn(*mut Cq, *mut CqErrEntry, u64) -> isize>,
        sread: Unused,
        sreadfrom: Unused,
        signal: Unused,
        strerror: Option<unsafe extern "C" fn(*mut Cq, c_int, *const c_void, *mut c_char, usize) -> *const c_char>,
    }
    CqAttr = "fi_cq_attr" {
        size: usize,
        flags: u64,
        format: u32,
        wait_obj: u32,
        signaling_vector: c_int,
        wait_cond: u32,
        wait_set: *mut c_void,
    }
    CqDataEntry = "fi_cq_data_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
    }
    CqErrEntry = "fi_cq_err_entry" {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }
    Endpoint = "fid_ep" {
        fid: Fid,
        ops: Unused,
        cm: *const CmOps,
        msg: *const MsgOps,
        rma: *const RmaOps,
    }
    CmOps = "fi_ops_cm" {
        size: usize,
        setname: Unused,
        getname: Option<unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int>,
    }
    MsgOps = "fi_ops_msg" {
        size: usize,
        recv: Option<unsafe extern "C" fn(*mut Endpoint, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize>,
        recvv: Unused,
        recvmsg: Unused,
        send: Option<unsafe extern "C" fn(*mut Endpoint, *const c_void, usize, *mut c_void, u64, *mut c_void) -> isize>,
    }
    #[allow(clippy::type_complexity)]
    RmaOps = "fi_ops_rma" {
        size: usize,
        read: Unused,
        readv: Unused,
        readmsg: Unused,
        write: Unused,
        writev: Unused,
        writemsg: Unused,
        inject: Unused,
        writedata: Option<
            unsafe extern "C" fn(*mut Endpoint, *const c_void, usize, *mut c_void, u64, u64, u64, u64, *mut c_void) -> isize,
        >,
    }
    Info = "fi_info" {
        next: *mut Info,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut Fid,
        tx_attr: *mut TxAttr,
        rx_attr: *mut RxAttr,
        ep_attr: *mut EpAttr,
        domain_attr: *mut DomainAttr,
        fabric_attr: *mut FabricAttr,
        nic: *mut c_void,
    }
    TxAttr = "fi_tx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
        iov_limit: usize,
        rma_iov_limit: usize,
        tclass: u32,
    }
    RxAttr = "fi_rx_attr" {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
        iov_limit: usize,
    }
    EpAttr = "fi_ep_attr" {
        kind: u32,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
        msg_prefix_size: usize,
        max_order_raw_size: usize,
        max_order_war_size: usize,
        max_order_waw_size: usize,
        mem_tag_format: u64,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        auth_key_size: usize,
        auth_key: *mut u8,
    }
    DomainAttr = "fi_domain_attr" {
        domain: *mut Domain,
        name: *const c_char,
        threading: u32,
        control_progress: u32,
        data_progress: u32,
        resource_mgmt: u32,
        av_type: u32,
        mr_mode: c_int,
        mr_key_size: usize,
        cq_data_size: usize,
        cq_cnt: usize,
        ep_cnt: usize,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        max_ep_tx_ctx: usize,
        max_ep_rx_ctx: usize,
        max_ep_stx_ctx: usize,
        max_ep_srx_ctx: usize,
        cntr_cnt: usize,
        mr_iov_limit: usize,
        caps: u64,
        mode: u64,
        auth_key: *mut u8,
        auth_key_size: usize,
        max_err_data: usize,
        mr_cnt: usize,
        tclass: u32,
    }
    FabricAttr = "fi_fabric_attr" {
        fabric: *mut Fabric,
        name: *const c_char,
        prov_name: *const c_char,
        prov_version: u32,
        api_version: u32,
    }
    /// What a provider may ask to have for as long as an operation goes on.
    Context = "fi_context2" {
        internal: [*mut c_void; 8],
    }
}

constants! {
    VERSION: u32 = 1 << 16 | 17, "FI_VERSION(1, 17)";
    MSG: u64 = 1 << 1, "FI_MSG";
    RMA: u64 = 1 << 2, "FI_RMA";
    WRITE: u64 = 1 << 9, "FI_WRITE";
    RECV: u64 = 1 << 10, "FI_RECV";
    SEND: u64 = 1 << 11, "FI_SEND";
    REMOTE_WRITE: u64 = 1 << 13, "FI_REMOTE_WRITE";
    REMOTE_CQ_DATA: u64 = 1 << 17, "FI_REMOTE_CQ_DATA";
    LOCAL_COMM: u64 = 1 << 51, "FI_LOCAL_COMM";
    REMOTE_COMM: u64 = 1 << 52, "FI_REMOTE_COMM";
    NUMERIC_HOST: u64 = 1 << 55, "FI_NUMERICHOST";
    SOURCE: u64 = 1 << 57, "FI_SOURCE";
    CONTEXT2: u64 = 1 << 52, "FI_CONTEXT2";
    CONTEXT: u64 = 1 << 59, "FI_CONTEXT";
    ADDR_UNSPEC: u64 = u64::MAX, "FI_ADDR_UNSPEC";
    KEY_NOTAVAIL: u64 = u64::MAX, "FI_KEY_NOTAVAIL";
    MR_LOCAL: c_int = 1 << 2, "FI_MR_LOCAL";
    MR_VIRT_ADDR: c_int = 1 << 4, "FI_MR_VIRT_ADDR";
    MR_ALLOCATED: c_int = 1 << 5, "FI_MR_ALLOCATED";
    MR_PROV_KEY: c_int = 1 << 6, "FI_MR_PROV_KEY";
    MR_ENDPOINT: c_int = 1 << 9, "FI_MR_ENDPOINT";
    SOCKADDR: u32 = 1, "FI_SOCKADDR";
    SOCKADDR_IN: u32 = 2, "FI_SOCKADDR_IN";
    SOCKADDR_IN6: u32 = 3, "FI_SOCKADDR_IN6";
    ADDR_STR: u32 = 9, "FI_ADDR_STR";
    EP_RDM: u32 = 3, "FI_EP_RDM";
    THREAD_DOMAIN: u32 = 3, "FI_THREAD_DOMAIN";
    RM_ENABLED: u32 = 2, "FI_RM_ENABLED";
    AV_MAP: u32 = 1, "FI_AV_MAP";
    AV_TABLE: u32 = 2, "FI_AV_TABLE";
    CQ_FORMAT_DATA: u32 = 3, "FI_CQ_FORMAT_DATA";
    WAIT_FD: u32 = 3, "FI_WAIT_FD";
    GETWAIT: c_int = 5, "FI_GETWAIT";
    ENABLE: c_int = 6, "FI_ENABLE";
    EAVAIL: c_int = 259, "FI_EAVAIL";
}
