//! `nacre rdma tune`: compares the settings of each RDMA card and of this machine with the tuning
//! profile of the card. Changes nothing.

use nacre_transport_rdma_link::{Device, Fabric, Roots, Setting, Verdict, tuning};
use serde_json::json;

use super::devices::no_device;
use crate::{Failure, output};

pub(super) fn run(roots: &Roots, wanted: Option<&str>, as_json: bool) -> Result<(), Failure> {
    let fabric = Fabric::read(&roots.sys);
    let devices: Vec<&Device> = fabric
        .devices
        .iter()
        .filter(|device| wanted.is_none_or(|name| device.name == name))
        .collect();
    if let Some(name) = wanted
        && devices.is_empty()
    {
        return Err(no_device(&fabric, name));
    }
    let profiles: Vec<(&Device, Vec<Setting>)> = devices
        .into_iter()
        .map(|device| (device, tuning(roots, device)))
        .collect();
    if as_json {
        let devices: Vec<_> = profiles
            .iter()
            .map(|(device, settings)| json!({"device": device.name, "driver": device.driver, "settings": settings}))
            .collect();
        return output::json(&json!(devices));
    }
    if profiles.is_empty() {
        return super::none_there();
    }
    for (device, settings) in &profiles {
        show(device, settings)?;
    }
    Ok(())
}

fn show(device: &Device, settings: &[Setting]) -> Result<(), Failure> {
    if settings.is_empty() {
        return output::line(&format!(
            "{}: a software device has no profile; it is for tests",
            device.name
        ));
    }
    output::line(&format!(
        "{} ({})",
        device.name,
        device.driver.as_deref().unwrap_or("unknown driver")
    ))?;
    output::table(
        &["SETTING", "OF", "FOUND", "RECOMMENDED", "VERDICT"],
        settings.iter().map(row),
    )?;
    for setting in settings {
        if setting.verdict == Verdict::Recommended {
            continue;
        }
        output::line(&format!("\n{}: {}", setting.name, setting.reason))?;
        if let Some(command) = &setting.command {
            output::line(&format!("    {command}"))?;
        }
    }
    output::line("")
}

pub(super) fn row(setting: &Setting) -> Vec<String> {
    vec![
        setting.name.to_owned(),
        setting.of.clone(),
        setting
            .found
            .clone()
            .unwrap_or_else(|| "unknown".to_owned()),
        setting.recommended.clone(),
        match setting.verdict {
            Verdict::Recommended => "as recommended",
            Verdict::Differs => "differs",
            Verdict::Unknown => "compare it",
        }
        .to_owned(),
    ]
}
